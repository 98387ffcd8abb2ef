"""OpenAI's batch format: lines with requests as rows, and their responses as output.

Fields: https://platform.openai.com/docs/api-reference/batch, and `BatchRequestInput` in vLLM's
`run_batch.py`.
"""
