// What both attention kernels share: which key a query sees, and how a score is shaped.

#include <metal_stdlib>
using namespace metal;

// Below every score, and finite: fast math promises nothing about infinities.
constant constexpr const float LOWEST = -1e30f;

// Causal, and at most `window` keys back if window is not 0. Positions count from the first token.
METAL_FUNC bool visible(int key, int query, int window) {
  return key <= query && (window == 0 || key > query - window);
}

// First key that the query at this position can see.
METAL_FUNC int first_visible(int query, int window) {
  return window == 0 ? 0 : max(0, query - window + 1);
}

// cap * tanh(score / cap), or the score itself if cap is 0. The bound keeps exp finite.
METAL_FUNC float capped(float score, float cap) {
  if (cap == 0) {
    return score;
  }
  const float e = exp(2 * clamp(score / cap, -20.0f, 20.0f));
  return cap * (e - 1) / (e + 1);
}
