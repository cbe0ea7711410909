"""What `jax.export` must know to write a function of this package's pytrees to bytes."""

import importlib
import json

from jax import export


def serializable[Node: type](node: Node) -> Node:
    """Registers a pytree dataclass, whose static fields are strings and ints, for serialized functions; returns it.

    Its name is part of what is written: renamed, older files cannot be read. Reading one loads the kernels' runtime,
    which XLA looks for when it loads a kernel: nothing else in a process that only reads steps would.
    """

    def static_of(data: bytes) -> tuple[object, ...]:
        importlib.import_module("inkling_pallas.kernels.mosaic")
        return tuple(json.loads(data))

    export.register_pytree_node_serialization(
        node,
        serialized_name=f"inkling_pallas.{node.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=static_of,
    )
    return node
