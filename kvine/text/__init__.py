"""Text to token ids and back: tokenizers, chat templates, incremental detokenizing and stop strings.

Everything here works on strings and ids alone; the engine never sees text, and this room never sees the engine.
"""
