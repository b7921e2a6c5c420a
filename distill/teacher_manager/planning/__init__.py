"""Decisions with an announced future: who is loaded, served, streamed and evicted, and when. No clock, no model."""
