"""The tiny policy: tokenizer, chat template, model, scripted expert, warm start."""
