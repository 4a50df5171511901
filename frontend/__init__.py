"""The HTTP server: OpenAI's, Anthropic's and the Responses API over the workers of a cluster.

`openai`, `anthropic` and `responses` read bodies and write answers; between them `chat`, `catalog`,
`tokens`, `generation` and `parsers` make a request of tokens and pieces of its answer. It imports
`router` and `runtime`, and no torch. Begin with `serving/app.py`, then `openai/api.py` and
`generation/generation.py`.
"""
