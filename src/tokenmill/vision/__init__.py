"""Images in: fetching and decoding safely, resizing, patches, and a cache of what was made."""
