"""Small compressors that use every construct of the language: what one back end computes, all must."""

PROGRAMS = {
    "topk": """
param P { float density = 0.01 in [0, 1]; }
void encode(float* gradient, uint8* compressed, P params) {
    int32* indices = topk(gradient, greater((int32) ceil(gradient.size * params.density), smaller(gradient.size, 1)));
    float* values = gradient[indices];
    compressed = concat(indices, values);
}
void decode(uint8* compressed, float* gradient, P params) {
    int32* indices = extract(compressed);
    float* values = extract(compressed);
    gradient = scatter(indices, values, gradient.size);
}
""",
    "drop": """
param P { float threshold = 1.0 in [0, 100]; }
float* source;
uint1 large(float x) { return abs(x) > P.threshold; }
uint1 largeAt(int32 i) { return abs(source[i]) > P.threshold; }
void encode(float* gradient, uint8* compressed, P params) {
    source = gradient;
    int32* indices = filter(range(gradient.size), largeAt);
    float* values = gradient[indices];
    compressed = concat(indices, values);
}
void decode(uint8* compressed, float* gradient, P params) {
    int32* indices = extract(compressed);
    float* values = extract(compressed);
    gradient = scatter(indices, values, gradient.size);
}
""",
    "groups": """
float* tops;
int32 levelOf(float x, int32 i) { return (int32) round(x / greater(tops[i / 100], 0.001) * 127) ; }
uint8 shifted(float x, int32 i) { return (uint8) (levelOf(x, i) + 128); }
float back(uint8 q, int32 i) { return (q - 128) * tops[i / 100] / 127; }
void encode(float* gradient, uint8* compressed) {
    tops = reduce(map(gradient, abs), greater, 100);
    uint8* q = map(gradient, range(gradient.size), shifted);
    compressed = concat(tops, q);
}
void decode(uint8* compressed, float* gradient) {
    tops = extract(compressed);
    uint8* q = extract(compressed);
    gradient = map(q, range(gradient.size), back);
}
""",
    "half": """
uint16 down(float x) { return half(x); }
float up(uint16 x) { return from_half(x); }
void encode(float* gradient, uint8* compressed) { compressed = concat(map(gradient, down)); }
void decode(uint8* compressed, float* gradient) { uint16* h = extract(compressed); gradient = map(h, up); }
""",
    "dice": """
param P { int32 sides = 6 in [2, 1000]; }
float* unused;
uint16 roll(float x) { return (uint16) (random(0, P.sides) + 2 * random(1, 3)); }
float back(uint16 x) { return x + random<float>(-1, 3); }
float plain(uint16 x) { return x; }
void encode(float* gradient, uint8* compressed, P params) {
    uint8 tail = 7;
    compressed = concat(tail, map(gradient, roll));
}
void decode(uint8* compressed, float* gradient, P params) {
    uint8 tail = extract(compressed);
    uint16* h = extract(compressed);
    gradient = map(h, plain);
}
""",
    "sampled": """
param P { float density = 0.01 in [0, 1]; }
float threshold;
float* source;
uint1 large(int32 i) { return abs(source[i]) >= threshold; }
void encode(float* gradient, uint8* compressed, P params) {
    source = gradient;
    int32 many = greater((int32) ceil(gradient.size * params.density), smaller(gradient.size, 1));
    float* some = sort(map(sample(gradient, 500), abs), greater);
    threshold = some[(int32) (some.size * params.density)];
    int32* candidates = filter(range(gradient.size), large);
    float* values = gradient[candidates];
    int32* best = topk(values, many);
    int32* indices = candidates[best];
    compressed = concat(threshold, indices, gradient[indices]);
}
void decode(uint8* compressed, float* gradient, P params) {
    threshold = extract(compressed);
    int32* indices = extract(compressed);
    float* values = extract(compressed);
    gradient = scatter(indices, values, gradient.size);
}
""",
    "runs": """
uint1 isSet(float x) { return abs(x) > 1; }
int32 one(uint1 b) { return b; }
int32 before(int32 s) { return s - 1; }
float* kept;
float pick(uint1 bit, int32 rank) { return bit ? kept[rank - 1] : 0; }
uint1 big(float x) { return abs(x) > 1; }
void encode(float* gradient, uint8* compressed) {
    uint1* bits = map(gradient, isSet);
    compressed = concat(bits, filter(gradient, big));
}
void decode(uint8* compressed, float* gradient) {
    uint1* bits = extract(compressed);
    kept = extract(compressed);
    gradient = map(bits, scan(bits, sum), pick);
}
""",
    "folds": """
param P { uint8 modulus = 97; }
int32 both(int32 a, int32 b) { return (a * b) % P.modulus; }
float furthest(float a, float b) { return abs(b) > abs(a) || (abs(b) == abs(a) && b > a) ? b : a; }
int32 level(float x) { return ((bits(x) >> 8) & 63) + 1; }
float far;
uint1 isUp(float x) { return x >= 0; }
float back(uint1 up) { return up ? far : -far; }
void encode(float* gradient, uint8* compressed, P params) {
    int32 product = reduce(map(gradient, level), both);
    far = reduce(gradient, furthest);
    compressed = concat(product, far, map(gradient, isUp));
}
void decode(uint8* compressed, float* gradient, P params) {
    int32 product = extract(compressed);
    far = extract(compressed);
    uint1* up = extract(compressed);
    gradient = map(up, back);
}
""",
}
