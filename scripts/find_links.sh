# Sourced: fills the array `links` with the places of local wheels that pip knows of; uv does not read pip's configuration.
links=()
while read -r place; do [[ -n $place ]] && links+=(--find-links "$place"); done < <(
  .venv/bin/pip config list 2>/dev/null | sed -n "s/.*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' | sort -u)
