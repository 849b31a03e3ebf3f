"""Parts that every layer shares: geometry, checks, layouts, formats, streams and events."""
