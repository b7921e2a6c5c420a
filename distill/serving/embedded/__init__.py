"""A model server over transformers: SGLang's native HTTP routes, continuous batching, weights that change mid-sentence.

Way of a request: `app` (routes) -> `requests` (JSON to checked jobs) -> `generate` -> `engine` (one thread owns the
model: `rows` decodes, `scoring` scores, `sampling` draws) -> `replies` (JSON or packed). `served` holds the model,
`weights` and `mesh_loader` change it. Start it with `python -m distill.serving.embedded`.

With `--teachers` it is a slot: `teachers` (routes) -> `slot` (residents, each with an engine; loads beside them) or
`streaming` (weights that pass through). `arena` counts the device's memory, `copying` brings weights into it.
"""
