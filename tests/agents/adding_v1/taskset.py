import verifiers.v1 as vf

from adding_v1.tool import AddingToolset


class AddingData(vf.TaskData):
    answer: int


class AddingTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddingTask(vf.Task[AddingData, vf.State, AddingTaskConfig]):
    @classmethod
    def toolsets(cls, config: AddingTaskConfig) -> list[vf.Toolset]:
        return [AddingToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right_sum(self, trace: vf.Trace) -> float:
        return float(f"says {self.data.answer} " in (trace.last_reply or ""))


class AddingConfig(vf.TasksetConfig):
    task: AddingTaskConfig = AddingTaskConfig()


class AddingTaskset(vf.Taskset[AddingTask, AddingConfig]):
    def load(self) -> list[AddingTask]:
        return [AddingTask(AddingData(prompt=f"What is 2+{b}?", answer=2 + b), self.config.task) for b in (3, 4)]
