"""The dashboard: pages for people, made on the server from one snapshot of the catalogue.

Pure functions make a view of what is known, templates print it, and nothing on a page comes from
anywhere but this service.
"""
