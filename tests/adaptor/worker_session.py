"""What a rank of the bare base averages, without any framework: `mpirun` or torchrun's variables (`frameworks.py`)."""

from adaptor.frameworks import CASES, SHAPES, STEPS, digest, gradients, plan_of, report
from penstock.adaptor import current
from penstock.adaptor.buckets import Gradient
from penstock.adaptor.session import Session


def averaged(case: str) -> list[str]:
    """Return a digest of what each step averages to."""
    world = current.world()
    session = Session(
        world, [Gradient(name, shape, "float32") for name, shape in SHAPES.items()], plan=plan_of(case, world.size)
    )
    found = []
    for step in range(STEPS):
        for index, values in reversed(list(enumerate(gradients(world.rank, step).values()))):
            session.put(index, values)
        found.append(digest(dict(zip(SHAPES, session.wait(), strict=True))))
        if step == 0:
            session.state_dict()
    session.close()
    return found


if __name__ == "__main__":
    current.init()
    report(current.rank(), bits={case: averaged(case) for case in CASES}, engine=current.world().engine)
    current.shutdown()
