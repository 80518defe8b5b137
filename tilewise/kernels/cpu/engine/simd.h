// Vectors of float and double as wide as the instruction set has them, and the few operations on them that the
// kernels need. GCC's and Clang's vector types carry the arithmetic; intrinsics stand only where those have no word.
//
// Everything here lives in an unnamed namespace: this file is compiled once for each instruction set, and a function
// that two sets shared by name could be linked into the wrong one.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int MR = 12;  // rows of the micro-kernel: 24 sums and 2 loads of 32 registers
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
constexpr int MR = 6;  // 12 sums, 2 loads and a broadcast of 16 registers
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16;
constexpr int MR = 12;
#else
constexpr int VECTOR_BYTES = 16;
constexpr int MR = 4;
#endif

template <class T> struct Lanes {
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> using Vec = typename Lanes<T>::type;
template <class T> constexpr int VL = VECTOR_BYTES / int(sizeof(T));  // lanes
template <class T> constexpr int NR = 2 * VL<T>;                      // columns of the micro-kernel

// The integer of a number's width: what expressions' integers and conditions are kept in beside it.
template <class T> struct IntOf;
template <> struct IntOf<float> { typedef int32_t type; };
template <> struct IntOf<double> { typedef int64_t type; };
template <class T> using Int = typename IntOf<T>::type;

template <class T> constexpr INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T> constexpr INLINE T larger(T a, T b) { return a < b ? b : a; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T> INLINE Vec<T> load(const T* p) {
    Vec<T> v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class T> INLINE void store(T* p, Vec<T> v) { memcpy(p, &v, sizeof v); }
template <class T> INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }  // x - 0 keeps the sign of -0, x + 0 does not

// The larger of each pair; a NaN in b is kept.
INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) {
#if defined(__AVX512F__)
    return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return a > b ? a : b;
#endif
}

// The smaller of each pair; a NaN in b is kept.
INLINE Vec<float> vmin(Vec<float> a, Vec<float> b) { return -vmax(-a, -b); }
INLINE Vec<double> vmin(Vec<double> a, Vec<double> b) { return -vmax(-a, -b); }

#if defined(__AVX512F__)
INLINE float max_of(Vec<float> v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE float sum_of(Vec<float> v) { return _mm512_reduce_add_ps((__m512)v); }
#elif defined(__AVX2__)
INLINE float max_of(Vec<float> v) {
    __m256 y = (__m256)v;
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
INLINE float sum_of(Vec<float> v) {
    __m256 y = (__m256)v;
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
#else
INLINE float max_of(Vec<float> v) {
    float m = v[0];
    for (int i = 1; i < VL<float>; i++) m = larger(m, float(v[i]));
    return m;
}
INLINE float sum_of(Vec<float> v) {
    float s = 0;
    for (int i = 0; i < VL<float>; i++) s += v[i];
    return s;
}
#endif
INLINE double max_of(Vec<double> v) {
    double m = v[0];
    for (int i = 1; i < VL<double>; i++) m = larger(m, double(v[i]));
    return m;
}
INLINE double sum_of(Vec<double> v) {
    double s = 0;
    for (int i = 0; i < VL<double>; i++) s += v[i];
    return s;
}

// Whether any lane of a is above that of b.
template <class V> INLINE bool any_above(V a, V b) {
    auto above = a > b;
    for (size_t i = 0; i < sizeof above / sizeof above[0]; i++)
        if (above[i]) return true;
    return false;
}
#if defined(__AVX512F__)
template <> INLINE bool any_above(Vec<float> a, Vec<float> b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
}
template <> INLINE bool any_above(Vec<double> a, Vec<double> b) {
    return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ) != 0;
}
#elif defined(__AVX2__)
template <> INLINE bool any_above(Vec<float> a, Vec<float> b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
}
template <> INLINE bool any_above(Vec<double> a, Vec<double> b) {
    return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_GT_OQ)) != 0;
}
#endif

// -- exponentials -----------------------------------------------------------------------------------------------------

template <class T> constexpr T LOG2E = T(1.4426950408889634074);

// exp(x) for x at most about 0: x = (n + r) ln 2, a polynomial gives 2^r, and n is added to the exponent's bits.
// Below the exponent's range the result is 0 exactly, as a masked score (-inf) must have; NaN stays NaN.
INLINE Vec<float> exp_of(Vec<float> x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded sum in the low bits
    Vec<float> t = x * LOG2E<float> + magic;
    Vec<float> r = x * LOG2E<float> - (t - magic);
    Vec<float> p = splat(1.535331941e-04f);  // of 2^r for |r| <= 0.5, to 2e-9
    p = p * r + 1.339892601e-03f;
    p = p * r + 9.618437858e-03f;
    p = p * r + 5.550332348e-02f;
    p = p * r + 2.402264791e-01f;
    p = p * r + 6.931472029e-01f;
    p = p * r + 1.0f;
    Vec<uint32_t> bits = (Vec<uint32_t>)p + ((Vec<uint32_t>)t << 23);
    return x >= -87.33f ? (Vec<float>)bits : vmax(Vec<float>{}, x);
}
INLINE Vec<double> exp_of(Vec<double> x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52
    Vec<double> t = x * LOG2E<double> + magic;
    Vec<double> n = t - magic;
    Vec<double> r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;  // ln 2 in two parts
    Vec<double> p = splat(1.6059043836821613e-10);                                          // 1 / k! from k = 13 down
    p = p * r + 2.08767569878681e-09;
    p = p * r + 2.505210838544172e-08;
    p = p * r + 2.755731922398589e-07;
    p = p * r + 2.7557319223985893e-06;
    p = p * r + 2.48015873015873e-05;
    p = p * r + 0.0001984126984126984;
    p = p * r + 0.001388888888888889;
    p = p * r + 0.008333333333333333;
    p = p * r + 0.041666666666666664;
    p = p * r + 0.16666666666666666;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    Vec<uint64_t> bits = (Vec<uint64_t>)p + ((Vec<uint64_t>)t << 52);
    return x >= -708.39 ? (Vec<double>)bits : vmax(Vec<double>{}, x);
}

template <class T> constexpr T INF = T(__builtin_inf());
INLINE float log_of(float x) { return __builtin_logf(x); }
INLINE double log_of(double x) { return __builtin_log(x); }

// -- numbers as they are stored ---------------------------------------------------------------------------------------

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

INLINE float widened(Half h) {
#if defined(__F16C__)
    return _cvtsh_ss(h.bits);
#elif defined(__aarch64__)
    __fp16 x;
    memcpy(&x, &h.bits, 2);
    return x;
#else
    // Without a branch, so that loops become vectors: scaling by 2^112 sets the exponent right, for subnormal numbers
    // too, and that of infinity and NaN is all ones.
    int32_t rest = int32_t(h.bits & 0x7fff) << 13, bits;
    float x;
    memcpy(&x, &rest, 4);
    x *= 5.192296858534828e33f;
    memcpy(&bits, &x, 4);
    bits |= (rest >= 0x0f800000 ? 0x7f800000 : 0) | int32_t(uint32_t(h.bits & 0x8000) << 16);
    memcpy(&x, &bits, 4);
    return x;
#endif
}
INLINE float widened(BFloat b) {
    uint32_t bits = uint32_t(b.bits) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
template <class T> INLINE T widened(T x) { return x; }

// Rounded to nearest, ties to even.
INLINE void narrow(float x, Half* h) {
#if defined(__F16C__)
    h->bits = _cvtss_sh(x, 0);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        h->bits = sign | 0x7e00;
    } else if (bits >= 0x477ff000) {  // rounds to beyond the largest
        h->bits = sign | 0x7c00;
    } else if (bits < 0x38800000) {  // subnormal: adding 0.5 puts the last place where float rounds
        float magnitude, half = 0.5f;
        memcpy(&magnitude, &bits, 4);
        magnitude += half;
        memcpy(&bits, &magnitude, 4);
        h->bits = sign | uint16_t(bits - 0x3f000000);
    } else {
        bits += 0xfff + ((bits >> 13) & 1);
        h->bits = sign | uint16_t((bits - 0x38000000) >> 13);
    }
#endif
}
INLINE void narrow(float x, BFloat* b) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    b->bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void narrow(float x, float* y) { *y = x; }
INLINE void narrow(double x, double* y) { *y = x; }

// A vector of stored numbers, widened.
INLINE Vec<float> load_wide(const float* p) { return load(p); }
INLINE Vec<double> load_wide(const double* p) { return load(p); }
INLINE Vec<float> load_wide(const Half* p) {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Vec<float> v;
    for (int i = 0; i < VL<float>; i++) v[i] = widened(p[i]);
    return v;
#endif
}
INLINE Vec<float> load_wide(const BFloat* p) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (Vec<float>)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
    return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    Vec<float> v;
    for (int i = 0; i < VL<float>; i++) v[i] = widened(p[i]);
    return v;
#endif
}

// to[i] = factor * from[i]
template <class T, class Stored> void widen_row(const Stored* from, T* to, int n, T factor) {
    int i = 0;
    for (; i + VL<T> <= n; i += VL<T>) store(to + i, load_wide(from + i) * factor);
    for (; i < n; i++) to[i] = widened(from[i]) * factor;
}

}  // namespace
