"""Porting: fingerprint, plan, translate, scaffold, map weights.

Notebook entries, imported from where they live (importing this package costs nothing):
`equiport.port.fingerprint_reader.fingerprint`, `equiport.port.plan.plan`.
"""
