"""The small text network of the calibration papers: word vectors, convolutions, global max pooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput


class GlobalPoolingCNNConfig(PreTrainedConfig):
    """Sizes of a `GlobalPoolingCNNForSequenceClassification`; the defaults are those of the papers' code.

    `vocab_size` is `len(tokenizer)`, `embedding_size` that of the GloVe file where one is used.
    Each convolution but the last is followed by a pooling of stride 1; kernel and pool have odd
    sizes. The padding token's vector is zero.
    """

    model_type = "global_pooling_cnn"

    vocab_size: int = 20_000
    embedding_size: int = 100
    hidden_size: int = 128
    num_conv_layers: int = 3
    kernel_size: int = 5
    pool_size: int = 5
    dropout: float = 0.3
    pad_token_id: int | None = 0
    initializer_range: float = 0.05

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        sizes = "vocab_size embedding_size hidden_size num_conv_layers kernel_size pool_size"
        for name in sizes.split():
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"expected {name} to be at least 1, got {size}")
            if name in ("kernel_size", "pool_size") and size % 2 == 0:
                raise ValueError(
                    f"expected {name} to be odd, to keep the text's length, got {size}"
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout to be in [0, 1), got {self.dropout}")


class GlobalPoolingCNNForSequenceClassification(PreTrainedModel):
    """Classify a text by convolutions over its words and the maximum of each channel over the text.

        word vectors -> [conv, ReLU, max pool] x 2 -> conv, ReLU -> max over the text
                     -> dense, ReLU, dropout -> classifier

    Notes:
        The authors' code pads every text to 1,000 words, and the padding takes part in the maximum.
        Here padded positions are zero before each layer and every layer but the first reads outputs
        of a ReLU, so that they never win: a text's logits do not depend on the batch it is in.
        "Same" convolutions let a single word work too.

    References:
        Lin, Chen, Yan, Network In Network, 2014 (pooling); Kumar, Sarawagi, Jain, Trainable
        Calibration Measures, 2018, and Mukhoti et al., Calibrating Deep Neural Networks using Focal
        Loss, 2020, whose code has this network.

    >>> model = GlobalPoolingCNNForSequenceClassification(GlobalPoolingCNNConfig(vocab_size=50, num_labels=4))
    >>> model(input_ids=torch.tensor([[7, 3, 9], [5, 0, 0]])).logits.shape
    torch.Size([2, 4])
    """

    config_class = GlobalPoolingCNNConfig
    base_model_prefix = "global_pooling_cnn"
    _input_embed_layer = "embeddings"

    def __init__(self, config: GlobalPoolingCNNConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(
            config.vocab_size, config.embedding_size, config.pad_token_id
        )
        self.convolutions = nn.ModuleList()
        n_in = config.embedding_size
        kernel = config.kernel_size
        for _ in range(config.num_conv_layers):
            layer = nn.Conv1d(n_in, config.hidden_size, kernel, padding=kernel // 2)
            self.convolutions.append(layer)
            n_in = config.hidden_size
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[torch.Tensor, ...]:
        """Logits (N, C) of ids (N, L), padded on either side, and the mean cross entropy in nats of labels (N,)."""
        pooled = self._pool_words(input_ids, attention_mask)
        logits = self.classifier(self.dropout(F.relu(self.dense(pooled))))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if return_dict in (None, True) else output.to_tuple()

    @torch.no_grad()
    def set_word_vectors(
        self, vectors: torch.Tensor, *, trainable: bool = False
    ) -> None:
        """Set word vectors (vocab_size, embedding_size) of `load_glove`; the papers do not train them further."""
        shape = tuple(self.embeddings.weight.shape)
        if vectors.shape != shape:
            raise ValueError(
                f"expected vectors to have the shape {shape}, got {tuple(vectors.shape)}; "
                "set vocab_size=len(tokenizer) and embedding_size to the vectors' length"
            )
        self.embeddings.weight.copy_(vectors)
        self.embeddings.requires_grad_(trainable)

    def _pool_words(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """(N, hidden_size), all zero for an empty text."""
        if input_ids.shape[1] == 0:
            return self.dense.weight.new_zeros(len(input_ids), self.config.hidden_size)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
            if self.config.pad_token_id is not None:
                attention_mask = input_ids != self.config.pad_token_id
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_traced or not input_ids.is_cpu:
            return self._convolve(input_ids, attention_mask)
        # On a CPU the time is the convolutions', and most of a batch of documents is padding. Texts
        # of like length go together, without the padding that they share (benchmarks/word_cnn.py).
        by_length = attention_mask.sum(dim=1).argsort()
        pooled = []
        for rows in by_length.split(16):
            mask = attention_mask[rows]
            used = mask.any(dim=0).nonzero().flatten().tolist() or [0]
            words = slice(used[0], used[-1] + 1)
            pooled.append(self._convolve(input_ids[rows, words], mask[:, words]))
        return torch.cat(pooled)[by_length.argsort()]

    def _convolve(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        # (N, channels, 1, L), in memory one position's channels after another: a pooling of stride
        # 1 is five times as fast so as torch's of one dimension.
        hidden = self.embeddings(input_ids).transpose(1, 2).unsqueeze(2)
        mask = attention_mask[:, None, None, :].to(hidden.dtype)
        kernel, pool = self.config.kernel_size, self.config.pool_size
        for number, convolution in enumerate(self.convolutions):
            if number > 0:
                beside = (0, pool // 2)
                hidden = F.max_pool2d(hidden, (1, pool), stride=1, padding=beside)
            # Zero cannot win a maximum over outputs of a ReLU, and adds nothing to a convolution.
            weight, bias = convolution.parameters()
            beside = (0, kernel // 2)
            hidden = F.conv2d(hidden * mask, weight.unsqueeze(2), bias, padding=beside)
            hidden = F.relu(hidden) * mask
        return hidden.amax(dim=(2, 3))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (nn.Conv1d, nn.Linear)):
            # Glorot's, as in Keras, in which the papers' code is written.
            init.xavier_uniform_(module.weight)
