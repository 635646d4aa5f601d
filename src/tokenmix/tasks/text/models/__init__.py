"""Text models in Hugging Face form; their public names are those of `tokenmix.text`."""
