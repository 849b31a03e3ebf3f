# The path stands for hybrid_ep.core.quantize (see _moved.py).
from hybrid_ep.core.quantize import CHANNELS_PER_SCALE as CHANNELS_PER_SCALE
from hybrid_ep.core.quantize import E4M3_MAX as E4M3_MAX
from hybrid_ep.core.quantize import SCALES_PER_WORD as SCALES_PER_WORD
from hybrid_ep.core.quantize import Fp8Format as Fp8Format
from hybrid_ep.core.quantize import cast_from_fp8 as cast_from_fp8
from hybrid_ep.core.quantize import cast_to_fp8 as cast_to_fp8
from hybrid_ep.core.quantize import pack_ue8m0 as pack_ue8m0
from hybrid_ep.core.quantize import unpack_ue8m0 as unpack_ue8m0
