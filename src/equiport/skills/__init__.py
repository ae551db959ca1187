"""The pages that agent CLIs load: what is wrong with them, and what a session that follows them must leave behind."""
