"""Samples between the teachers and the trainer. `memory` holds them; contract test: tests/contract/test_store.py."""
