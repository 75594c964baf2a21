// OpenCode plugin (its own extension point): ends the run at the turn limit, before the next request is made.
// OpenCode's own `steps` setting is only a plea to the model, written into the history as a fake assistant turn.
export const TurnLimit = async () => {
  const limit = Number(process.env.LEGORL_TURN_LIMIT)
  let turns = 0
  return {
    "chat.params": async (input) => {
      if (input.agent !== "title" && ++turns > limit) throw new Error("legorl: turn limit")
    },
  }
}
