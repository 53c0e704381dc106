"""The driver of a CPU on which Triton's kernels are interpreted."""

from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self):
        raise NotImplementedError

    def get_active_torch_device(self):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError
