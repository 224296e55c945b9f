# One episode with nothing but curl: begin, call the model, finish with a reward.
# URL=http://127.0.0.1:8321 sh curl_walk.sh
set -eu
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
BEGUN=$(curl -sf "$URL/api/episodes" -d '{"idempotency_key": "walk-'$$'-'$(date +%s)'",
  "task": {"id": "1", "payload": {"question": "1+1"}}, "policies": ["solver"]}')
EPISODE=$(echo "$BEGUN" | field episode_id) KEY=$(echo "$BEGUN" | field api_key)
curl -sf "$URL/v1/chat/completions" -H "Authorization: Bearer $KEY" -d '{"model": "solver",
  "messages": [{"role": "user", "content": "what is 1 plus 1 ?"}], "max_tokens": 8}'; echo
curl -sf "$URL/api/episodes/$EPISODE/finish" -H "Authorization: Bearer $KEY" -d '{"rewards": 1.0}'; echo
