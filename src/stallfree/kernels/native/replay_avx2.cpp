// The AVX2 path: with FMA and F16C.
#include <immintrin.h>

#include "update.h"

namespace {

struct AVX2 {
  using Float = __m256;
  using Int = __m256i;
  static constexpr int width = 8;
  static constexpr int unroll = 2;

  struct All {};
  struct First {
    int count;
  };
  static All all_lanes() { return {}; }
  static First first_lanes(int count) { return {count}; }

  static Float zero() { return _mm256_setzero_ps(); }
  static Float set1(float x) { return _mm256_set1_ps(x); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float fnma(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }

  static Int set1(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int mul(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
  static Int bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int bit_xor(Int a, Int b) { return _mm256_xor_si256(a, b); }
  template <int n> static Int shift_right(Int a) { return _mm256_srli_epi32(a, n); }
  static Int counting_from(uint32_t first) { return add(set1(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

  // IEEE square root and division: rsqrtps has 12 bits only, would need two Newton steps, and differs between vendors.
  struct Quotient {
    const __m256 root_scale, eps;

    Quotient(float root_scale, float eps) : root_scale(set1(root_scale)), eps(set1(eps)) {}

    Float operator()(Float m, Float v) const { return _mm256_div_ps(m, fma(_mm256_sqrt_ps(v), root_scale, eps)); }
  };

  static Float load(const float* p, All) { return _mm256_loadu_ps(p); }
  static Float load(const BF16* p, All) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half_words(p)), 16));
  }
  static Float load(const F16* p, All) { return _mm256_cvtph_ps(load_half_words(p)); }

  static void store(float* p, Float x, All) { _mm256_storeu_ps(p, x); }
  static void store(BF16* p, Float x, All lanes) {
    const Int odd = bit_and(shift_right<16>(_mm256_castps_si256(x)), set1(1u));
    store_stochastic(p, x, add(odd, set1(0x7fffu)), lanes);  // to the nearest, ties to even
  }
  static void store(F16* p, Float x, All) {
    store_half_words(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_stochastic(BF16* p, Float x, Int low, All) {
    const Int rounded = shift_right<16>(add(_mm256_castps_si256(x), low));
    const Int nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Int bits = _mm256_blendv_epi8(rounded, set1(0x7fc0u), nan);
    store_half_words(p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }

  // AVX2 has no masked 16-bit accesses: a tail goes through a full vector on the stack.
  template <class T> static Float load(const T* p, First lanes) {
    T whole[width] = {};
    __builtin_memcpy(whole, p, lanes.count * sizeof(T));
    return load(whole, All{});
  }
  template <class T> static void store(T* p, Float x, First lanes) {
    T whole[width];
    store(whole, x, All{});
    __builtin_memcpy(p, whole, lanes.count * sizeof(T));
  }
  static void store_stochastic(BF16* p, Float x, Int low, First lanes) {
    BF16 whole[width];
    store_stochastic(whole, x, low, All{});
    __builtin_memcpy(p, whole, lanes.count * sizeof(BF16));
  }

 private:
  static __m128i load_half_words(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void store_half_words(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
};

}  // namespace

namespace stallfree {
const Table avx2_table = STALLFREE_TABLE(AVX2);
}
