// The dtypes of callers' numbers.
#pragma once

namespace fedcore {

enum class Dtype { float32, float64, float16, bfloat16 };

}  // namespace fedcore
