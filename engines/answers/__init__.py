"""Answers that can be checked: taken out of a response, and compared with the right one."""
