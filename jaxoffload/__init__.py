"""Runs a JAX function whose working set does not fit in device memory."""

import jax as _jax

# Before anything of JAX's is used that another version does not have.
if not (0, 10) <= _jax.__version_info__ < (0, 13):
    raise ImportError(
        f"jaxoffload runs on jax 0.10 to 0.12, and this is jax {_jax.__version__}. "
        "Run: pip install 'jax>=0.10,<0.13' 'jaxlib>=0.10,<0.13'"
    )

try:
    from jaxoffload import _native as _native
except ImportError as error:
    raise ImportError(
        "jaxoffload's C++ runtime is not built, or is hidden by a source folder on the path. "
        "Run: pip install -e . (in the repository), or leave the repository's folder."
    ) from error

from jaxoffload import graph as graph
from jaxoffload import policies as policies
from jaxoffload.doctor import BackendReport as BackendReport
from jaxoffload.doctor import backends as backends
from jaxoffload.errors import BackendError as BackendError
from jaxoffload.errors import CaptureError as CaptureError
from jaxoffload.errors import DiskError as DiskError
from jaxoffload.errors import OffloadError as OffloadError
from jaxoffload.errors import OffloadWarning as OffloadWarning
from jaxoffload.errors import PlanError as PlanError
from jaxoffload.errors import RunError as RunError
from jaxoffload.errors import VerificationError as VerificationError
from jaxoffload.graphs.laws import VerifyError as VerifyError
from jaxoffload.plan.cost.machines import MACHINES as MACHINES
from jaxoffload.plan.cost.machines import Link as Link
from jaxoffload.plan.cost.machines import Machine as Machine
from jaxoffload.report.explain import Explanation as Explanation
from jaxoffload.report.predict import Prediction as Prediction
from jaxoffload.report.tradeoff import Tradeoff as Tradeoff
from jaxoffload.report.view import Comparison as Comparison
from jaxoffload.report.view import compare as compare
from jaxoffload.rewrite.compact import Compact as Compact
from jaxoffload.rewrite.compact import compact as compact
from jaxoffload.runtime.arrays import DiskArray as DiskArray
from jaxoffload.runtime.arrays import HostArray as HostArray
from jaxoffload.runtime.checkpoint_file import open_safetensors as open_safetensors
from jaxoffload.runtime.plan import Plan as Plan
from jaxoffload.runtime.profile import Profile as Profile
from jaxoffload.runtime.put import disk_put as disk_put
from jaxoffload.runtime.put import host_put as host_put
from jaxoffload.runtime.run import Run as Run
from jaxoffload.runtime.sharded import ShardedDiskArray as ShardedDiskArray
from jaxoffload.runtime.sharded import ShardedHostArray as ShardedHostArray
from jaxoffload.search.whole import WholeRun as WholeRun
from jaxoffload.transform.caches import clear_caches as clear_caches
from jaxoffload.transform.offload import offload as offload
from jaxoffload.transform.offloaded import Offloaded as Offloaded

__version__ = "0.1.0"
