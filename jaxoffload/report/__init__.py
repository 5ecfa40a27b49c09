"""What people look at: explanations, pictures, traces. Reads plans and runs; no stage reads it.

Importing it says how plans and runs show themselves (showing.py).
"""

from jaxoffload.report import perfetto as perfetto
from jaxoffload.report import told as told
from jaxoffload.report import view as view
from jaxoffload.report import words as words
