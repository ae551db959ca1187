"""Agents: one job at a time for a model that may read and write little, with its cost, its trace and its end told.

What a job is for is the business of those who ask for it; nothing that an agent says of its own work is believed here.
"""
