"""Model calls: dialects, prompts, generation, retries."""
