"""Skills, agents and references into the folder of an agent CLI, and out of it again."""
