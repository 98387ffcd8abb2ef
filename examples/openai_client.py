"""A streamed chat with the first model behind the front: `pip install openai`.

The environment has OPENAI_BASE_URL (the front's URL with `/v1`), OPENAI_API_KEY (printed by
`vlaunch front keys add`), and SSL_CERT_FILE (from `vlaunch front certificate`).
"""

import sys

import openai

client = openai.OpenAI()
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": " ".join(sys.argv[1:]) or "Say hello."}],
    max_tokens=24,
    stream=True,
)
for chunk in stream:
    sys.stdout.write(chunk.choices[0].delta.content or "")
    sys.stdout.flush()
sys.stdout.write("\n")
