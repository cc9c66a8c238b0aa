"""The ten architectures once more, as torch modules with the public names: the oracle for the torch-free ones.

Written from the architectures' papers with `torch.nn` alone; they run on the meta device, where nothing is computed.
"""

import math
from collections import OrderedDict

import torch
from torch import nn


def _norm(channels):
    return nn.BatchNorm2d(channels)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), _norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), _norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), _norm(4 * width)
        self.downsample = None
        if inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, _norm(4 * width))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, depths):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), _norm(64)
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class VGG(nn.Module):
    def __init__(self, depths):
        super().__init__()
        features, channels = [], 3
        for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        hidden = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, 1000))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class DenseLayer(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.norm1, self.conv1 = _norm(inputs), nn.Conv2d(inputs, 128, 1, bias=False)
        self.norm2, self.conv2 = _norm(128), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)


class DenseNet(nn.Module):
    def __init__(self, depths):
        super().__init__()
        parts = OrderedDict(conv0=nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm0=_norm(64), relu0=nn.ReLU())
        parts["pool0"], channels = nn.MaxPool2d(3, 2, 1), 64
        for block, depth in enumerate(depths, start=1):
            dense = OrderedDict((f"denselayer{i + 1}", DenseLayer(channels + 32 * i)) for i in range(depth))
            parts[f"denseblock{block}"], channels = nn.Sequential(dense), channels + 32 * depth
            if block < len(depths):
                shrink = nn.Conv2d(channels, channels // 2, 1, bias=False)
                transition = OrderedDict(norm=_norm(channels), relu=nn.ReLU(), conv=shrink, pool=nn.AvgPool2d(2))
                parts[f"transition{block}"], channels = nn.Sequential(transition), channels // 2
        self.features = nn.Sequential(parts | {"norm5": _norm(channels)})
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, x):
        return self.classifier(torch.relu(self.features(x)).mean((2, 3)))


class ConvReLU(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)

    def forward(self, x):
        return torch.relu(self.conv(x))


class Inception(nn.Module):
    def __init__(self, inputs, one, reduce3, three, reduce5, five, pooled):
        super().__init__()
        self.branch1 = ConvReLU(inputs, one, 1)
        self.branch2 = nn.Sequential(ConvReLU(inputs, reduce3, 1), ConvReLU(reduce3, three, 3))
        self.branch3 = nn.Sequential(ConvReLU(inputs, reduce5, 1), ConvReLU(reduce5, five, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvReLU(inputs, pooled, 1))

    def forward(self, x):
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class Auxiliary(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.conv, self.fc1, self.fc2 = ConvReLU(inputs, 128, 1), nn.Linear(2048, 1024), nn.Linear(1024, 1000)

    def forward(self, x):
        pooled = nn.functional.avg_pool2d(x, 5, 3, ceil_mode=True)
        return self.fc2(torch.relu(self.fc1(self.conv(pooled).flatten(1))))


class GoogLeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = ConvReLU(3, 64, 7, 2), ConvReLU(64, 64, 1), ConvReLU(64, 192, 3)
        self.inception3a = Inception(192, 64, 96, 128, 16, 32, 32)
        self.inception3b = Inception(256, 128, 128, 192, 32, 96, 64)
        self.inception4a = Inception(480, 192, 96, 208, 16, 48, 64)
        self.aux1 = Auxiliary(512)
        self.inception4b = Inception(512, 160, 112, 224, 24, 64, 64)
        self.inception4c = Inception(512, 128, 128, 256, 24, 64, 64)
        self.inception4d = Inception(512, 112, 144, 288, 32, 64, 64)
        self.aux2 = Auxiliary(528)
        self.inception4e = Inception(528, 256, 160, 320, 32, 128, 128)
        self.inception5a = Inception(832, 256, 160, 320, 32, 128, 128)
        self.inception5b = Inception(832, 384, 192, 384, 48, 128, 128)
        self.fc = nn.Linear(1024, 1000)

    def forward(self, x):
        x = _pool(self.conv1(x))
        x = _pool(self.conv3(self.conv2(x)))
        x = self.inception4a(_pool(self.inception3b(self.inception3a(x))))
        first = self.aux1(x)
        x = self.inception4d(self.inception4c(self.inception4b(x)))
        second = self.aux2(x)
        x = self.inception5b(self.inception5a(_pool(self.inception4e(x))))
        return first + second + self.fc(x.mean((2, 3)))


def _pool(x):
    return nn.functional.max_pool2d(x, 3, 2, ceil_mode=True)


def _attend(query, key, value, heads):
    batch, positions, width = query.shape
    q, k, v = (part.view(batch, positions, heads, width // heads).transpose(1, 2) for part in (query, key, value))
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads), -1)
    return (weights @ v).transpose(1, 2).reshape(batch, positions, width)


class BertBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        projections = {part: nn.Linear(width, width) for part in ("query", "key", "value")}
        output = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width)})
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": output})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 4 * width)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * width, width), "LayerNorm": nn.LayerNorm(width)})

    def forward(self, x):
        projected = [self.attention["self"][part](x) for part in ("query", "key", "value")]
        attended = self.attention["output"]["dense"](_attend(*projected, self.heads))
        x = self.attention["output"]["LayerNorm"](attended + x)
        y = self.output["dense"](nn.functional.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](y + x)


class Bert(nn.Module):
    def __init__(self, width, depth, heads):
        super().__init__()
        tables = {"word_embeddings": 30522, "position_embeddings": 512, "token_type_embeddings": 2}
        embeddings = {name: nn.Embedding(rows, width) for name, rows in tables.items()}
        self.embeddings = nn.ModuleDict(embeddings | {"LayerNorm": nn.LayerNorm(width)})
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertBlock(width, heads) for _ in range(depth))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, words):
        tables = self.embeddings
        x = tables["word_embeddings"](words) + tables["token_type_embeddings"](torch.zeros_like(words))
        x = tables["LayerNorm"](x + tables["position_embeddings"](torch.arange(words.shape[1], device=words.device)))
        for block in self.encoder["layer"]:
            x = block(x)
        return torch.tanh(self.pooler["dense"](x[:, 0]))


class TransposedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        attention = {"c_attn": TransposedLinear(width, 3 * width), "c_proj": TransposedLinear(width, width)}
        self.attn = nn.ModuleDict(attention)
        self.mlp = nn.ModuleDict(
            {"c_fc": TransposedLinear(width, 4 * width), "c_proj": TransposedLinear(4 * width, width)}
        )

    def forward(self, x):
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        x = x + self.attn["c_proj"](_attend(*parts, self.heads))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(50257, 768), "wpe": nn.Embedding(1024, 768)}
        parts["h"] = nn.ModuleList(GPT2Block(768, 12) for _ in range(12))
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(768)})
        self.lm_head = nn.Linear(768, 50257, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, words):
        body = self.transformer
        x = body["wte"](words) + body["wpe"](torch.arange(words.shape[1], device=words.device))
        for block in body["h"]:
            x = block(x)
        return self.lm_head(body["ln_f"](x))


class LSTMPTB(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(10000, 1500), nn.LSTM(1500, 1500, 2, batch_first=True)
        self.decoder = nn.Linear(1500, 10000)

    def forward(self, words):
        return self.decoder(self.rnn(self.encoder(words))[0])


def _image():
    return torch.empty(1, 3, 224, 224)


def _words(tokens):
    return lambda: torch.zeros(1, tokens, dtype=torch.long)


# name: (how to build the module, how to make one sample)
MODELS = {
    "bert_base": (lambda: Bert(768, 12, 12), _words(128)),
    "bert_large": (lambda: Bert(1024, 24, 16), _words(128)),
    "densenet201": (lambda: DenseNet((6, 12, 48, 32)), _image),
    "googlenet": (GoogLeNet, _image),
    "gpt2": (GPT2, _words(1024)),
    "lstm_ptb": (LSTMPTB, _words(35)),
    "resnet152": (lambda: ResNet((3, 8, 36, 3)), _image),
    "resnet50": (lambda: ResNet((3, 4, 6, 3)), _image),
    "vgg16": (lambda: VGG((2, 2, 3, 3, 3)), _image),
    "vgg19": (lambda: VGG((2, 2, 4, 4, 4)), _image),
}
