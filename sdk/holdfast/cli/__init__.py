"""The command line: ``holdfast up | down | status | ls | show | verify | doctor``."""
