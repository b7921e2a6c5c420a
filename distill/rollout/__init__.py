"""From prompts to finished samples: `prompts` reads them, `admission` paces them, `pool` has them written."""
