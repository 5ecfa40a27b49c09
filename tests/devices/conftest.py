"""Tests of functions over several devices are only looked at where there are eight: in the
processes of test_processes.py."""

import jax

from tests.devices.test_processes import DEVICES, FILES

collect_ignore = [] if len(jax.devices()) >= DEVICES else FILES
