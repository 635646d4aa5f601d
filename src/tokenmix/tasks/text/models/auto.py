"""Our model type in transformers' automatic classes. Importing this tells them of the config, which costs nothing.

The models follow when the first config is made: only then is it sure that somebody wants one, and that nothing of
transformers is half imported, as it is while `tokenmix._import_hook` runs.
"""

from functools import cache

from transformers.models.auto.configuration_auto import AutoConfig

from tokenmix.tasks.text.models.config import GMLPConfig

__all__ = ["register_models"]


@cache
def register_models() -> None:
    """Tell transformers which model belongs to a config of type `gmlp` in which automatic class."""
    from transformers import (
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
    )

    from tokenmix.tasks.text.models.heads import (
        GMLPForMaskedLM,
        GMLPForQuestionAnswering,
        GMLPForSequenceClassification,
    )
    from tokenmix.tasks.text.models.modeling import GMLPModel

    AutoModel.register(GMLPConfig, GMLPModel)
    AutoModelForMaskedLM.register(GMLPConfig, GMLPForMaskedLM)
    AutoModelForSequenceClassification.register(GMLPConfig, GMLPForSequenceClassification)
    AutoModelForQuestionAnswering.register(GMLPConfig, GMLPForQuestionAnswering)


AutoConfig.register(GMLPConfig.model_type, GMLPConfig)
