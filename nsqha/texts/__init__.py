"""Texts that others wrote, read as their own programs read them, and bounded before that.

Downwards:

    gojson        JSON as Go's decoder reads it
    toml_text     TOML files
"""
