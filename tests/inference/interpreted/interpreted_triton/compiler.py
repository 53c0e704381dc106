"""Nothing is compiled for a CPU on which Triton's kernels are interpreted."""

from triton.backends.compiler import BaseBackend


class InterpreterCompiler(BaseBackend):
    @staticmethod
    def supports_target(target) -> bool:  # noqa: ARG004
        return False

    def hash(self) -> str:
        raise NotImplementedError

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        raise NotImplementedError
