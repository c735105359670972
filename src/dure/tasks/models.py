"""The models of the built-in tasks: plain `nn.Module`s that know nothing of machines.

The sizes are those of the papers, and each class documents its number of parameters in closed form.
A classifier maps inputs of shape (B, ...) to scores (B, classes); a language model maps indices (B,
T) to scores (B, vocabulary, T), classes second as `torch.nn.functional.cross_entropy` expects.
Every model works in float64 after `.double()`.

Sources: H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017 (TwoNN, CNN, CharLSTM); A. Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019 (Transformer); K. He et al., "Deep Residual Learning for Image
Recognition", CVPR 2016, section 4.2, and Y. Wu, K. He, "Group Normalization", ECCV 2018 (ResNet);
F. Gers, J. Schmidhuber, "Recurrent Nets that Time and Count", IJCNN 2000 (peepholes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogisticRegression(nn.Module):
    """Logistic regression: scores = W x + b. Parameters: (features + 1) * classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores (B, classes). inputs: (B, ...) with `features` numbers an example."""
        scores: Tensor = self.linear(inputs.flatten(1))
        return scores


class TwoNN(nn.Module):
    """Two hidden layers of ReLU units, the FedAvg paper's "2NN".

    Parameters: (features + 1) w + (w + 1) w + (w + 1) classes; 199,210 for 784-200-200-10.
    """

    def __init__(self, features: int = 784, classes: int = 10, width: int = 200) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores (B, classes). inputs: (B, ...) with `features` numbers an example."""
        scores: Tensor = self.layers(inputs)
        return scores


class CNN(nn.Module):
    """The FedAvg paper's CNN.

    5x5 convolutions to 32 and 64 channels, 2x2 max pooling after each, then 512 units. Padding
    keeps the size ("same"), which gives the paper's number of parameters: (25 in_channels + 1) 32 +
    (25 * 32 + 1) 64 + (64 (size / 4)^2 + 1) 512 + 513 classes; 1,663,370 for 28x28 grey pixels and
    10 classes.

    Raises ValueError if size is not a positive multiple of 4, because it is halved twice.
    """

    def __init__(self, in_channels: int = 1, size: int = 28, classes: int = 10) -> None:
        super().__init__()
        if size < 4 or size % 4:
            raise ValueError(
                f"the CNN halves the image twice: its size has to be a multiple of 4, not {size}"
            )
        # padding=2 keeps the size under a 5x5 kernel; each pooling halves it.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores (B, classes). inputs: (B, in_channels, size, size)."""
        scores: Tensor = self.classifier(self.features(inputs))
        return scores


class ResidualBlock(nn.Module):
    """Residual block: relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))).

    The shortcut is x itself, or a 1x1 convolution and a norm if the shape changes.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        # bias=False: the norm after each convolution has a bias of its own.
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
                nn.GroupNorm(groups, channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, channels, H / stride, W / stride). inputs: (B, in_channels, H, W)."""
        hidden = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.shortcut(inputs) + self.norm2(self.conv2(hidden)))


class ResNet(nn.Module):
    """The residual network for small images.

    depth = 6n + 2 layers, n blocks at each of w, 2w and 4w channels. Group normalisation replaces
    batch normalisation: an output does not depend on the other examples of the batch, so there are
    no running statistics to average over clients with different data.

    Parameters: (9 in_channels + 2) w + n (378 w^2 + 28 w) - 80 w^2 + 12 w + (4 w + 1) classes, n =
    (depth - 2) / 6.

    depth: 8, 14, 20, ...; width: w, a multiple of `groups`. Raises ValueError for another depth or
    width.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        depth: int = 8,
        width: int = 16,
        groups: int = 8,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(
                f"the depth of this ResNet has to be 6n + 2, such as 8, 14 or 20, not {depth}"
            )
        if width < 1 or width % groups:
            raise ValueError(f"the width has to be a multiple of the {groups} groups, not {width}")
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                # Stages after the first begin by halving the image and doubling the channels.
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(channels, width << stage, stride, groups))
                # w, 2w, 4w.
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores (B, classes). inputs: (B, in_channels, height, width), any size."""
        hidden = self.blocks(F.relu(self.norm(self.stem(inputs))))
        # The mean over the image, so that any size of image fits the classifier.
        scores: Tensor = self.classifier(hidden.mean(dim=(2, 3)))
        return scores


class PeepholeLSTM(nn.Module):
    """An LSTM layer whose gates also see the cell, through one weight a unit and gate.

        i = sigmoid(W_i z + p_i c)    f = sigmoid(W_f z + p_f c)    c' = f c + i tanh(W_g z)
        o = sigmoid(W_o z + p_o c')   h' = o tanh(c')               z = (x, h)

    Parameters: 4 width (features + width) + 3 width; it has no bias, see `CharLSTM`. torch's LSTM
    has no peepholes, so this layer computes step by step and is several times slower.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        # The same initialisation as torch's own LSTM.
        bound = 1 / math.sqrt(width)
        self.weight_ih = nn.Parameter(torch.empty(4 * width, features).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * width, width).uniform_(-bound, bound))
        self.peepholes = nn.Parameter(torch.empty(3, width).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """Return the hidden states, (B, T, width), and None. inputs: (B, T, features).

        The None is in the place of nn.LSTM's state.
        """
        # A single product for all positions and gates: the part independent of the previous step.
        projected = F.linear(inputs, self.weight_ih)
        hidden = cell = inputs.new_zeros(len(inputs), self.weight_hh.shape[1])
        p_i, p_f, p_o = self.peepholes
        outputs = []
        for at_t in projected.unbind(1):
            i, f, g, o = (at_t + F.linear(hidden, self.weight_hh)).chunk(4, dim=1)
            # The peepholes of i and f see the old cell, that of o the new cell.
            cell = torch.sigmoid(f + p_f * cell) * cell + torch.sigmoid(
                i + p_i * cell
            ) * torch.tanh(g)
            hidden = torch.sigmoid(o + p_o * cell) * torch.tanh(cell)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), None


class CharLSTM(nn.Module):
    """The FedAvg paper's character model.

    An embedding of 8, two LSTM layers of 256 units, and a linear output layer.

    A gate has one bias, as in the paper and in Keras, where torch's LSTM has two biases that are
    only ever added. Here the bias is the weight of an additional input that is always 1, so that
    torch's fast kernels can be used without their biases.

    Parameters, V symbols, embedding e, width w:

        V e + 4w (e + 1 + w) + 4w (w + 1 + w) + (w + 1) V    and 3w a layer more with peepholes.

    820,522 for 90 symbols (TensorFlow Federated's Shakespeare). The paper's 866,578 has no solution
    in V with one bias, nor with two; with peepholes, an option of its TensorFlow's LSTM cell, it
    has exactly one: V = 258, the 256 values of a byte and two marks. That is arithmetic, the paper
    does not state it.
    """

    def __init__(
        self, vocabulary: int = 258, embedding: int = 8, width: int = 256, peepholes: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        # An additional input for each layer: that of the biases.
        sizes = (embedding + 1, width + 1)
        self.layers = nn.ModuleList(
            PeepholeLSTM(size, width)
            if peepholes
            else nn.LSTM(size, width, bias=False, batch_first=True)
            for size in sizes
        )
        self.output = nn.Linear(width, vocabulary)

    def forward(self, indices: Tensor) -> Tensor:
        """Return scores of the next character, (B, vocabulary, T). indices: int64 (B, T)."""
        hidden = self.embedding(indices)
        for layer in self.layers:
            # The additional input, always 1, whose weights are the biases.
            hidden, _ = layer(F.pad(hidden, (0, 1), value=1.0))
        scores: Tensor = self.output(hidden)
        return scores.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Parameters: 12 width^2 + 13 width.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (B, T, width). hidden: (B, T, width)."""
        hidden = hidden + self._drop(self._attend(self.attention_norm(hidden)))
        expanded = F.gelu(self.expand(self.mlp_norm(hidden)))
        return hidden + self._drop(self.contract(expanded))

    def _attend(self, hidden: Tensor) -> Tensor:
        # (B, T, width) to (B, heads, T, width / heads), the shape for the attention.
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=2)
        )
        # A function does not know whether the model trains.
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        projected: Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return projected

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training)


class Transformer(nn.Module):
    """A decoder like GPT-2's.

    Learned positions, normalisation before each sublayer, causal attention, GELU.

    Parameters, V symbols, context C, L layers, width w: V w + C w + L (12 w^2 + 13 w) + 2 w, and V
    w more for the output layer unless its weights are tied to the embedding's.

    Raises ValueError if the heads do not divide the width.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 80,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"{heads} heads cannot share a width of {width}: choose a multiple of {heads}"
            )
        self.context = context
        self.dropout = dropout
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self._initialise()
        if tied:
            # After the initialisation, so that the embedding's values stay.
            self.output.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Initialise as GPT-2: weights normal with deviation 0.02, biases 0.

        Layers that feed the residual stream are divided by sqrt(2 L), for there are 2 such layers a
        block: so the stream's variance does not grow with the depth.
        """
        for name, parameter in self.named_parameters():
            # Weights of linear layers and embeddings; the norms' own, of one dimension, stay 1.
            if parameter.ndim == 2:
                # The last layers of attention and MLP, whose outputs are added to the stream.
                enters_stream = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if enters_stream else 0.02
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, indices: Tensor) -> Tensor:
        """Return scores of the next symbol, (B, vocabulary, T). indices: int64 (B, T).

        Raises ValueError if T is greater than the context.
        """
        length = indices.shape[1]
        if length > self.context:
            raise ValueError(
                f"a sequence of {length} does not fit into the context of {self.context}"
            )
        positions = torch.arange(length, device=indices.device)
        hidden = F.dropout(
            self.embedding(indices) + self.position(positions), self.dropout, self.training
        )
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.output(self.norm(hidden))
        return scores.transpose(1, 2)
