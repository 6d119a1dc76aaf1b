#!/usr/bin/env bash
# Quick checks of a running service: clients/examples/curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
key=(${LOGPROBD_API_KEY:+--header "Authorization: Bearer $LOGPROBD_API_KEY"})
ask() { curl --silent --show-error --fail-with-body "${key[@]}" "$@"; echo; }

ask "$url/readyz"
ask "$url/info"
# One prompt, two completions.
ask "$url/logprobs" --json '{"prompt": "The capital of France is", "completions": [" Paris.", " Lyon."]}'
# Ids, as a trainer sends them; a temperature, entropy and the two likeliest tokens.
ask "$url/logprobs" --json '{"groups": [{"prompt": [504, 3575], "completions": [[282, 4649], [314]]}], "temperature": 0.7, "entropy": true, "top_logprobs": 2}'
# One number a completion, as DPO needs it.
ask "$url/logprobs" --json '{"prompt": "2 + 2 =", "completions": [" 4", " 5"], "reduce": "sum"}'
# As OpenAI's clients ask.
ask "$url/v1/completions" --json '{"prompt": "The capital of France is", "max_tokens": 1, "echo": true, "logprobs": 1}'
