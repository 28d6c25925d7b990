"""Export what `models`, `integrations` and the lab need from inside the library, besides its public names.

They import nothing else from it, which tests/test_layering.py checks. These names change; do not import from here.
"""

# ruff: noqa: F401
from dilated_attention import checks, storage
from dilated_attention.backends import blocks, cpu, fused, native, table, triton
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import Problem
from dilated_attention.cache import Kept, Named, PlanCache, derived
from dilated_attention.call import Call, Pattern, as_autocast, dtype_of_products
from dilated_attention.errors import ContextParallelError
from dilated_attention.execution import layouts_of
from dilated_attention.kernels.configurations import ARCHITECTURES, Kernel, Shape
from dilated_attention.merge import merge_into
from dilated_attention.mesh import TRANSPORTS, Mesh, context_group, held_mesh, mesh_size
from dilated_attention.neighborhood import tiled
from dilated_attention.nn.attention import Sharded
from dilated_attention.nn.positions import Tables
from dilated_attention.nn.selection import attend_listed
from dilated_attention.nn.transformer import ShardDropout
from dilated_attention.parallel import presence
from dilated_attention.parallel.choosing import fetch_listed
from dilated_attention.parallel.comm import Framing, Link, Traffic, Transfer, link_of, use_link
from dilated_attention.parallel.partition import balanced_bounds
from dilated_attention.parallel.sharding import agreed_seed, from_rank, require_same, summed_over
from dilated_attention.patterns import LayoutOfLength, describe_unserved
from dilated_attention.pictures import plot_places
from dilated_attention.plan import Plan, Rows, StridedGroup, plan_dilated, progressions
from dilated_attention.routing.indexer import tables_at
from dilated_attention.scores import Scores
from dilated_attention.torch_internals import flattened, hooked, in_autocast, require_true, without_overrides
