"""The training side: what turns scored samples into new weights. One package a training engine."""
