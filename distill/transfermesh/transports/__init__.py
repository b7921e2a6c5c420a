"""Ways for the bytes of a bucket to travel. `base` says what one must do; the registry names them."""
