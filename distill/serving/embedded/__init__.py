"""A model server over transformers: SGLang's native HTTP routes, continuous batching, weights that change mid-sentence.

Way of a request: `app` (routes) -> `requests` (JSON to checked jobs) -> `engine` (one thread owns the model: `rows`
decodes, `scoring` scores, `sampling` draws) -> `replies` (JSON or packed). `served` holds the model, `weights` and
`mesh_loader` change it. Start it with `python -m distill.serving.embedded`.
"""
