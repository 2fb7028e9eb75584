// Loaders bring one tile of ROWS x COLS elements from device to threadgroup memory in two halves,
// so that the arithmetic of the previous tile can stand between them:
//
//   fetch()       device -> registers, a few wide accesses a thread; outside the matrix: zero
//   place(tile)   registers -> threadgroup memory, dequantized on the way if packed
//   next()        one tile further along K
//
// K runs along the columns of a tile, or, with DOWN, along its rows. A row is padded by 16 bytes:
// with it the eight rows of a fragment start in different banks.

#include "dequantize.metal"

// A tile of a plain matrix (rows, cols), VEC elements an access. cols is a multiple of VEC.
template <typename T, int ROWS, int COLS, int THREADS, int VEC, bool DOWN>
struct DenseLoader {
  using Element = T;
  using Run = typename Raw<VEC * sizeof(T)>::type;
  CONST LD = COLS + 16 / sizeof(T);
  CONST BYTES = ROWS * LD * sizeof(T);
  CONST ACROSS = COLS / VEC;  // accesses in a row of the tile
  CONST COUNT = ROWS * ACROSS;
  CONST STEPS = (COUNT + THREADS - 1) / THREADS;
  static_assert(COLS % VEC == 0, "a row of the tile is whole accesses");

  const device T* at;  // first element of the tile
  int stride;          // elements in a row of the matrix
  int rows;            // rows and columns from here to the edge of the matrix
  int cols;
  int id;  // thread in the threadgroup
  Run held[STEPS];

  METAL_FUNC void begin(const device T* matrix, int all_rows, int all_cols, int row, int col,
                        int thread_id) thread {
    at = matrix + size_t(row) * all_cols + col;
    stride = all_cols;
    rows = all_rows - row;
    cols = all_cols - col;
    id = thread_id;
  }
  METAL_FUNC void fetch() thread {
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int n = id + s * THREADS;
      const int row = n / ACROSS;
      const int col = n % ACROSS * VEC;
      held[s] = Run(0);
      if (n < COUNT && row < rows && col < cols) {
        held[s] = *(const device Run*)(at + size_t(row) * stride + col);
      }
    }
  }
  METAL_FUNC void place(threadgroup T* tile) const thread {
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int n = id + s * THREADS;
      if (n < COUNT) {
        *(threadgroup Run*)(tile + n / ACROSS * LD + n % ACROSS * VEC) = held[s];
      }
    }
  }
  // Both at once, one access after the other: for a tile that the registers have no room for.
  METAL_FUNC void copy(threadgroup T* tile) const thread {
    for (int n = id; n < COUNT; n += THREADS) {
      const int row = n / ACROSS;
      const int col = n % ACROSS * VEC;
      Run run = Run(0);
      if (row < rows && col < cols) {
        run = *(const device Run*)(at + size_t(row) * stride + col);
      }
      *(threadgroup Run*)(tile + row * LD + col) = run;
    }
  }
  METAL_FUNC void next() thread {
    if (DOWN) {
      at += size_t(ROWS) * stride;
      rows -= ROWS;
    } else {
      at += COLS;
      cols -= COLS;
    }
  }
};

// A tile of a packed matrix, kept as float: the product then rounds nothing but its result.
template <typename Scheme, int ROWS, int COLS, int THREADS, bool DOWN>
struct QuantizedLoader {
  using Element = float;
  CONST LD = COLS + 4;
  CONST BYTES = ROWS * LD * 4;
  // Weights a thread decodes at a time: an equal share, but whole words and within a group.
  CONST SHARE = ROWS * COLS / THREADS;
  CONST MOST = Scheme::GROUP < 32 ? Scheme::GROUP : 32;
  CONST RUN = SHARE <= Scheme::PACK ? Scheme::PACK : SHARE >= MOST ? MOST : SHARE;
  CONST WORDS = RUN * Scheme::BITS / 32;
  CONST ACROSS = COLS / RUN;
  CONST COUNT = ROWS * ACROSS;
  CONST STEPS = (COUNT + THREADS - 1) / THREADS;
  static_assert(COLS % 32 == 0 && RUN % Scheme::PACK == 0, "a row of the tile is whole runs");

  Scheme matrix;
  int row0;  // of the tile in the matrix
  int col0;
  int rows;  // of the matrix
  int id;    // thread in the threadgroup
  Group group[STEPS];
  uint held[STEPS][WORDS];

  METAL_FUNC void begin(Scheme packed, int all_rows, int row, int col, int thread_id) thread {
    matrix = packed;
    row0 = row;
    col0 = col;
    rows = all_rows;
    id = thread_id;
  }
  METAL_FUNC void fetch() thread {
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int n = id + s * THREADS;
      const int row = row0 + n / ACROSS;
      const int col = col0 + n % ACROSS * RUN;
      group[s] = {0, 0};
      UNROLL
      for (int i = 0; i < WORDS; i++) {
        held[s][i] = 0;
      }
      if (n < COUNT && row < rows && col < matrix.K) {
        load_words(matrix.words(row, col), held[s]);
        group[s] = matrix.group(row, col);
      }
    }
  }
  METAL_FUNC void place(threadgroup float* tile) const thread {
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      const int n = id + s * THREADS;
      if (n < COUNT) {
        threadgroup float* to = tile + n / ACROSS * LD + n % ACROSS * RUN;
        UNROLL
        for (int i = 0; i < RUN; i += 4) {
          *(threadgroup float4*)(to + i) = float4(
              weight<Scheme>(held[s], i, group[s]), weight<Scheme>(held[s], i + 1, group[s]),
              weight<Scheme>(held[s], i + 2, group[s]), weight<Scheme>(held[s], i + 3, group[s]));
        }
      }
    }
  }
  METAL_FUNC void next() thread {
    if (DOWN) {
      row0 += ROWS;
    } else {
      col0 += COLS;
    }
  }
};
