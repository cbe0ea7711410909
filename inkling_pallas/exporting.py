"""What `jax.export` must know to write a function of this package's pytrees to bytes."""

import json

from jax import export


def serializable[Node: type](node: Node) -> Node:
    """Registers a pytree dataclass, whose static fields are strings and ints, for serialized functions; returns it.

    Its name is part of what is written: renamed, older files cannot be read.
    """
    export.register_pytree_node_serialization(
        node,
        serialized_name=f"inkling_pallas.{node.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
    )
    return node
