// softmax(q k^T) v over the cache, one read of k and v for all query rows that can share it.
//
//   row     a query head at a position; the rows of one kv head are ordered by position, then head
//   tile    up to 16 such rows: every k and v that is loaded serves them all
//   scores  16 keys at a time, transposed in registers, so that a lane is a key and no sum crosses
//           lanes: score[r] (16 keys) += q[r, d] * kT[d] (16 keys)
//   block   64 keys: scores of the tile, their maximum, exp, then the weighted sum of v
//   chunk   512 keys: a softmax of its own (maximum m, sum l, weighted values o). Chunks are merged
//           in order, by whoever has them: one thread after another chunk, or sdpa_merge when the
//           chunks were computed by several. Both give the same bits, for any L and thread count.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

constexpr int kBlock = 64;
constexpr int kMaxRows = 16;
constexpr int kMaxHead = 512;
constexpr int kAhead = 8192;  // bytes of k, and of v

template <Type T>
static inline f32x16 load_as(const void* base, size_t i) {
  if constexpr (T == Type::f32) return load((const float*)base + i);
  if constexpr (T == Type::f16) return load_f16((const uint16_t*)base + i);
  return load_bf16((const uint16_t*)base + i);
}

// One softmax over some keys: m, l and o of R rows. D numbers in o are padded to 16.
struct State {
  float m[kMaxRows], l[kMaxRows];
  alignas(64) float o[kMaxRows][kMaxHead];

  void clear(int rows, int d) {
    for (int r = 0; r < rows; r++) {
      m[r] = -__builtin_inff();
      l[r] = 0;
      for (int i = 0; i < d; i += 16) store(o[r] + i, splat(0));
    }
  }
};

static inline float exp1(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

// total += part, for one row of d numbers.
static void merge(float& m, float& l, float* o, float part_m, float part_l, const float* part_o,
                  int d) {
  if (part_m == -__builtin_inff()) return;
  const float top = m > part_m ? m : part_m;
  const float keep = exp1(m - top), add = exp1(part_m - top);
  m = top;
  l = l * keep + part_l * add;
  for (int i = 0; i < d; i += 16)
    store(o + i, fma(load(part_o + i), splat(add), load(o + i) * splat(keep)));
}

static int row_tiles(const Sdpa& a) {
  return (a.heads / a.kv_heads * a.length + a.tile - 1) / a.tile;
}

// The keys that an item may read: bytes of k_cache, and of v_cache.
struct Range {
  size_t begin, bytes;
};

static Range keys_of(const Sdpa& a, int item) {
  const int chunks = a.partial ? a.chunks : 1, head = item / chunks / row_tiles(a);
  const int chunk = item % chunks * a.chunk, keys = a.offset + a.length;
  const int visible = a.window > 0 ? a.offset - a.window + 1 : 0;
  const int first = chunk > visible ? chunk : visible;
  const int end = a.partial && chunk + a.chunk < keys ? chunk + a.chunk : keys;
  const size_t row = a.head_dim * size_of(a.cache_type);
  return {((size_t)head * a.capacity + first) * row, first < end ? (end - first) * row : 0};
}

// What to ask memory for while p is read: kAhead further on, and at the end of a range the next
// one.
struct Ahead {
  const char* limit;
  ptrdiff_t within, beyond;

  Ahead(const void* cache, Range now, Range next) {
    within = now.bytes < (size_t)kAhead ? now.bytes : kAhead;
    limit = (const char*)cache + now.begin + now.bytes - within;
    beyond = (const char*)cache + next.begin - limit;
  }
  const char* of(const char* p) const { return p + (p < limit ? within : beyond); }
};

struct Tile {
  const float* q;       // (D, height), scaled
  const char *k, *v;    // (capacity, D) of this kv head
  const float* turned;  // (capacity/16, D, 16) of this kv head, or null
  Ahead ahead_k, ahead_v;
  int position[kMaxRows];  // of each row
  int rows;
};

// Dims i .. i+15 of keys j .. j+15 of k (capacity, D), of which n count -> r[d]: a lane is a key.
template <Type T>
static inline void turn_tile(const char* k, const Ahead& ahead, int D, int i, int j, int n,
                             f32x16 (&r)[16]) {
  const size_t e = (size_t)j * D + i;
  const char* coming = ahead.of((const char*)at(k, T, e));
  QRUN_UNROLL
  for (int key = 0; key < 16; key++) prefetch((const char*)at(coming, T, (size_t)key * D));
  if (n >= 16 && i + 16 <= D) {
    QRUN_UNROLL
    for (int key = 0; key < 16; key++) r[key] = load_as<T>(k, e + (size_t)key * D);
  } else {  // nothing beyond the valid keys, or beyond a row, is read
    for (int key = 0; key < 16; key++)
      r[key] = key < n ? load_first(at(k, T, e + (size_t)key * D), T, D - i) : splat(0);
  }
  transpose(r);
}

// Keys j .. j+15 -> turned (D, 16).
template <Type T>
static inline void turn(const char* k, const Ahead& ahead, int D, int j, int n, float* turned) {
  if (n <= 0) {
    __builtin_memset(turned, 0, (size_t)D * 16 * sizeof(float));
    return;
  }
  for (int i = 0; i < D; i += 16) {
    f32x16 r[16];
    turn_tile<T>(k, ahead, D, i, j, n, r);
    for (int d = 0; d < 16 && i + d < D; d++) store(turned + (i + d) * 16, r[d]);
  }
}

// Scores of keys j .. j+15 of which n count, multiplied while they are turned.
template <int R, Type T>
static inline void turn_and_score(const Tile& t, int D, int j, int n, float (&p)[R][kBlock],
                                  int at_p) {
  f32x16 score[R];
  QRUN_UNROLL
  for (int r = 0; r < R; r++) score[r] = splat(0);
  for (int i = 0; i < D && n > 0; i += 16) {
    f32x16 k[16];
    turn_tile<T>(t.k, t.ahead_k, D, i, j, n, k);
    const float* q = t.q + i * R;
    if (i + 16 <= D) {
      QRUN_UNROLL
      for (int d = 0; d < 16; d++) QRUN_UNROLL
      for (int r = 0; r < R; r++) score[r] = fma(splat(q[d * R + r]), k[d], score[r]);
    } else {
      for (int d = 0; i + d < D; d++)
        for (int r = 0; r < R; r++) score[r] = fma(splat(q[d * R + r]), k[d], score[r]);
    }
  }
  QRUN_UNROLL
  for (int r = 0; r < R; r++) store(p[r] + at_p, score[r]);
}

// Few rows alone would wait for each multiply-add: they take several vectors of keys, or of v, at
// a time, so that 8 to 16 sums are under way.
template <int R>
constexpr int kWide = R <= 4   ? 4
                      : R <= 8 ? 2
                               : 1;

// o[r] (D) += sum over n keys of p[r][j] * v[j] (D), for columns i .. i + 16*W.
template <int R, int W, Type T>
static inline void weigh(const float (&p)[R][kBlock], const char* v, const Ahead& ahead, int D,
                         int j0, int n, int i, float (*sum)[kMaxHead]) {
  f32x16 o[R][W];
  QRUN_UNROLL
  for (int r = 0; r < R; r++) QRUN_UNROLL
  for (int w = 0; w < W; w++) o[r][w] = load(sum[r] + i + w * 16);
  for (int j = 0; j < n; j++) {
    const size_t e = (size_t)(j0 + j) * D + i;
    const char* coming = ahead.of((const char*)at(v, T, e));
    f32x16 x[W];
    QRUN_UNROLL
    for (int w = 0; w < W; w++) {
      prefetch((const char*)at(coming, T, w * 16));
      x[w] = i + w * 16 + 16 <= D ? load_as<T>(v, e + w * 16) : load_first(at(v, T, e), T, D - i);
    }
    QRUN_UNROLL
    for (int r = 0; r < R; r++) QRUN_UNROLL
    for (int w = 0; w < W; w++) o[r][w] = fma(splat(p[r][j]), x[w], o[r][w]);
  }
  QRUN_UNROLL
  for (int r = 0; r < R; r++) QRUN_UNROLL
  for (int w = 0; w < W; w++) store(sum[r] + i + w * 16, o[r][w]);
}

// Scores of keys j0 .. j0+n-1, n <= 64.
template <int R, Type T>
static inline void score(const Tile& t, int D, int j0, int n, float (&p)[R][kBlock]) {
  constexpr int W = kWide<R>;
  alignas(64) float own[kBlock * kMaxHead];
  const float* turned = own;
  if (t.turned)
    turned = t.turned + (size_t)j0 * D;
  else
    for (int j = 0; j < kBlock; j += 16) turn<T>(t.k, t.ahead_k, D, j0 + j, n - j, own + j * D);
  for (int j = 0; j < kBlock; j += 16 * W) {
    f32x16 score[R][W];
    QRUN_UNROLL
    for (int r = 0; r < R; r++) QRUN_UNROLL
    for (int w = 0; w < W; w++) score[r][w] = splat(0);
    for (int d = 0; d < D; d++) {
      f32x16 k[W];
      QRUN_UNROLL
      for (int w = 0; w < W; w++) k[w] = load(turned + (size_t)(j + w * 16) * D + d * 16);
      QRUN_UNROLL
      for (int r = 0; r < R; r++) QRUN_UNROLL
      for (int w = 0; w < W; w++) score[r][w] = fma(splat(t.q[d * R + r]), k[w], score[r][w]);
    }
    QRUN_UNROLL
    for (int r = 0; r < R; r++) QRUN_UNROLL
    for (int w = 0; w < W; w++) store(p[r] + j + w * 16, score[r][w]);
  }
}

// Scores, then the online softmax step.
template <int R, Type T>
static void block(const Sdpa& a, const Tile& t, int j0, int n, State& s) {
  constexpr int W = kWide<R>;
  const int D = a.head_dim;
  alignas(64) float p[R][kBlock];
  if (!t.turned && R <= 4)
    for (int j = 0; j < kBlock; j += 16) turn_and_score<R, T>(t, D, j0 + j, n - j, p, j);
  else
    score<R, T>(t, D, j0, n, p);
  alignas(64) float top[16] = {}, keep[16] = {};
  for (int r = 0; r < R; r++) {
    if (a.softcap > 0)
      for (int j = 0; j < kBlock; j += 16)
        store(p[r] + j, tanh(load(p[r] + j) * splat(1 / a.softcap)) * splat(a.softcap));
    const int at = t.position[r];
    const int first = a.window > 0 && at - a.window + 1 > j0 ? at - a.window + 1 - j0 : 0;
    const int end = at + 1 - j0 < n ? at + 1 - j0 : n;
    if (first > 0 || end < kBlock)
      for (int j = 0; j < kBlock; j++)
        if (j < first || j >= end) p[r][j] = -__builtin_inff();
    f32x16 most = load(p[r]);
    for (int j = 16; j < kBlock; j += 16) most = max(most, load(p[r] + j));
    top[r] = greatest(most);
    top[r] = s.m[r] > top[r] ? s.m[r] : top[r];
    keep[r] = s.m[r];
    s.m[r] = top[r];
    if (top[r] == -__builtin_inff()) top[r] = 0;  // nothing visible yet: no inf - inf below
  }
  store(keep, exp(load(keep) - load(top)));
  for (int r = 0; r < R; r++) {
    f32x16 total = splat(0);
    for (int j = 0; j < kBlock; j += 16) {
      f32x16 e = exp(load(p[r] + j) - splat(top[r]));
      store(p[r] + j, e);
      total = total + e;
    }
    s.l[r] = s.l[r] * keep[r] + sum(total);
    if (keep[r] != 1)
      for (int i = 0; i < D; i += 16) store(s.o[r] + i, load(s.o[r] + i) * splat(keep[r]));
  }
  int i = 0;
  for (; i + 16 * W <= D; i += 16 * W) weigh<R, W, T>(p, t.v, t.ahead_v, D, j0, n, i, s.o);
  for (; i < D; i += 16) weigh<R, 1, T>(p, t.v, t.ahead_v, D, j0, n, i, s.o);
}

using Block = void (*)(const Sdpa&, const Tile&, int, int, State&);

template <int R>
static Block pick_type(Type t) {
  return t == Type::f32   ? block<R, Type::f32>
         : t == Type::f16 ? block<R, Type::f16>
                          : block<R, Type::bf16>;
}
static Block pick(int rows, Type t, int& height) {
  height = rows <= 4 ? rows : rows <= 8 ? 8 : 16;
  return rows == 1   ? pick_type<1>(t)
         : rows == 2 ? pick_type<2>(t)
         : rows == 3 ? pick_type<3>(t)
         : rows == 4 ? pick_type<4>(t)
         : rows <= 8 ? pick_type<8>(t)
                     : pick_type<16>(t);
}

static void write(const Sdpa& a, int b, int kv, int row, float l, const float* o) {
  const int group = a.heads / a.kv_heads, head = kv * group + row % group, at_l = row / group;
  const size_t out = (((size_t)b * a.length + at_l) * a.heads + head) * a.head_dim;
  const f32x16 inverse = splat(1 / l);
  for (int i = 0; i < a.head_dim; i += 16)
    store_first(at(a.y, a.type, out + i), a.type, load(o + i) * inverse, a.head_dim - i);
}

// Items: (B, Hkv, 16 keys). Many tiles would turn the same keys over and over; here once for all.
void sdpa_turn(const Sdpa& a, int item0, int item1) {
  const int D = a.head_dim, groups = a.turned_keys / 16, keys = a.offset + a.length;
  for (int item = item0; item < item1; item++) {
    const int head = item / groups, j = item % groups * 16, n = keys - j < 16 ? keys - j : 16;
    const char* k = (const char*)at(a.k_cache, a.cache_type, (size_t)head * a.capacity * D);
    float* turned = a.turned + (size_t)item * D * 16;
    const size_t row = D * size_of(a.cache_type);
    const Range all{(size_t)head * a.capacity * row, keys * row};
    const Range next{(item1 - 1) / groups > head ? all.begin + a.capacity * row : all.begin,
                     all.bytes};
    const Ahead ahead(a.k_cache, all, next);
    if (a.cache_type == Type::f32)
      turn<Type::f32>(k, ahead, D, j, n, turned);
    else if (a.cache_type == Type::f16)
      turn<Type::f16>(k, ahead, D, j, n, turned);
    else
      turn<Type::bf16>(k, ahead, D, j, n, turned);
  }
}

// Items: (B, Hkv, row tiles), or (B, Hkv, row tiles, chunks) when `partial` is there.
void sdpa(const Sdpa& a, int item0, int item1) {
  const int group = a.heads / a.kv_heads, rows_all = group * a.length, tiles = row_tiles(a);
  const int D = a.head_dim, d16 = (D + 15) & ~15;
  alignas(64) float q[kMaxRows * kMaxHead];
  State part, total;
  const int items = a.batch * a.kv_heads * tiles * (a.partial ? a.chunks : 1);
  for (int item = item0; item < item1; item++) {
    const int chunk = a.partial ? item % a.chunks : -1, unit = a.partial ? item / a.chunks : item;
    const int tile = unit % tiles, head = unit / tiles, kv = head % a.kv_heads,
              b = head / a.kv_heads;
    const int row0 = tile * a.tile;
    const Range now = keys_of(a, item), next = item + 1 < items ? keys_of(a, item + 1) : now;
    Tile t{.ahead_k{a.k_cache, now, next}, .ahead_v{a.v_cache, now, next}};
    if (item == item0 && !a.turned)  // nobody has asked for its first lines yet
      for (ptrdiff_t i = 0; i < t.ahead_k.within; i += 64) {
        prefetch((const char*)a.k_cache + now.begin + i);
        prefetch((const char*)a.v_cache + now.begin + i);
      }
    t.rows = rows_all - row0 < a.tile ? rows_all - row0 : a.tile;
    int height;
    const Block step = pick(t.rows, a.cache_type, height);
    const size_t cache = ((size_t)b * a.kv_heads + kv) * a.capacity * D;
    t.k = (const char*)at(a.k_cache, a.cache_type, cache);
    t.v = (const char*)at(a.v_cache, a.cache_type, cache);
    t.turned = a.turned ? a.turned + ((size_t)b * a.kv_heads + kv) * a.turned_keys * D : nullptr;
    t.q = q;
    for (int r = 0; r < height; r++) {  // spare rows repeat the last one
      const int row = row0 + (r < t.rows ? r : t.rows - 1);
      const size_t from =
          (((size_t)b * a.heads + kv * group + row % group) * a.length + row / group) * D;
      t.position[r] = a.offset + row / group;
      for (int i = 0; i < D; i += 16) {
        alignas(64) float x[16];
        store(x, load_first(at(a.q, a.type, from + i), a.type, D - i) * splat(a.scale));
        for (int d = 0; d < 16 && i + d < D; d++) q[(i + d) * height + r] = x[d];
      }
    }
    const int last = t.position[t.rows - 1];
    const int first = a.window > 0 && t.position[0] >= a.window ? t.position[0] - a.window + 1 : 0;
    total.clear(t.rows, D);
    for (int c = chunk < 0 ? first / a.chunk : chunk; c <= (chunk < 0 ? last / a.chunk : chunk);
         c++) {
      part.clear(height, D);
      const int end = (c + 1) * a.chunk < last + 1 ? (c + 1) * a.chunk : last + 1;
      for (int j = c * a.chunk; j < end; j += kBlock)
        if (j + kBlock > first) step(a, t, j, end - j < kBlock ? end - j : kBlock, part);
      for (int r = 0; r < t.rows; r++) {
        if (chunk < 0) {
          merge(total.m[r], total.l[r], total.o[r], part.m[r], part.l[r], part.o[r], D);
        } else {
          float* out = a.partial + ((size_t)item * a.tile + r) * (16 + d16);
          out[0] = part.m[r];
          out[1] = part.l[r];
          for (int i = 0; i < D; i += 16) store(out + 16 + i, load(part.o[r] + i));
        }
      }
    }
    if (chunk < 0)
      for (int r = 0; r < t.rows; r++) write(a, b, kv, row0 + r, total.l[r], total.o[r]);
  }
}

// Items: (B, Hkv, row tiles).
void sdpa_merge(const Sdpa& a, int item0, int item1) {
  const int rows_all = a.heads / a.kv_heads * a.length, tiles = row_tiles(a), D = a.head_dim,
            d16 = (D + 15) & ~15;
  alignas(64) float o[kMaxHead];
  for (int item = item0; item < item1; item++) {
    const int tile = item % tiles, head = item / tiles;
    for (int r = 0; r < a.tile && tile * a.tile + r < rows_all; r++) {
      float m = -__builtin_inff(), l = 0;
      for (int i = 0; i < D; i += 16) store(o + i, splat(0));
      for (int c = 0; c < a.chunks; c++) {
        const float* part = a.partial + (((size_t)item * a.chunks + c) * a.tile + r) * (16 + d16);
        merge(m, l, o, part[0], part[1], part + 16, D);
      }
      write(a, head / a.kv_heads, head % a.kv_heads, tile * a.tile + r, l, o);
    }
  }
}

}  // namespace qrun::QRUN_NS
