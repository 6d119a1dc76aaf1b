"""`logprobd score`: files of prompts and completions in, the same rows with their logprobs out."""
