from ourshard.checkpoint.background import SaveWarning as SaveWarning
from ourshard.checkpoint.background import wait_for_save as wait_for_save
from ourshard.checkpoint.running import load as load
from ourshard.checkpoint.running import save as save
from ourshard.config import ShardConfig as ShardConfig
from ourshard.integrations.exporting import iter_full_parameters as iter_full_parameters
from ourshard.integrations.plugin import ShardPlugin as ShardPlugin
from ourshard.integrations.restart import load_after_restart as load_after_restart
from ourshard.integrations.stopping import asked_to_end as asked_to_end
from ourshard.integrations.switch import disable as disable
from ourshard.integrations.switch import enable as enable
from ourshard.integrations.trainer_arguments import ShardTrainingArguments as ShardTrainingArguments
from ourshard.integrations.trainer_callback import ShardCallback as ShardCallback
from ourshard.runtime.api import adopt_optimizer as adopt_optimizer
from ourshard.runtime.api import clip_grad_norm_ as clip_grad_norm_
from ourshard.runtime.api import clip_grad_value_ as clip_grad_value_
from ourshard.runtime.api import engine_of as engine_of
from ourshard.runtime.api import full_state_dict as full_state_dict
from ourshard.runtime.api import gathered as gathered
from ourshard.runtime.api import load_full_state_dict as load_full_state_dict
from ourshard.runtime.api import reset as reset
from ourshard.runtime.api import shard_model as shard_model
from ourshard.runtime.lazy_init import init_context as init_context
from ourshard.runtime.scaler import ShardGradScaler as ShardGradScaler

__version__: str
