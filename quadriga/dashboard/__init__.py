"""The run directory as a page in a browser, and the readers that the terminal commands share with it.

Everything here only reads, and expects any file to be half-written, foreign, huge, hostile or gone.
"""
