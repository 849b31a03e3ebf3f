# The path stands for hybrid_ep.core.quantize (see _moved.py).
from hybrid_ep.core.quantize import CHANNELS_PER_BLOCK as CHANNELS_PER_BLOCK
from hybrid_ep.core.quantize import CHANNELS_PER_SCALE as CHANNELS_PER_SCALE
from hybrid_ep.core.quantize import E2M1_MAX as E2M1_MAX
from hybrid_ep.core.quantize import E4M3_MAX as E4M3_MAX
from hybrid_ep.core.quantize import SCALES_PER_WORD as SCALES_PER_WORD
from hybrid_ep.core.quantize import Fp8Format as Fp8Format
from hybrid_ep.core.quantize import Nvfp4Format as Nvfp4Format
from hybrid_ep.core.quantize import block_scales_of as block_scales_of
from hybrid_ep.core.quantize import cast_from_fp8 as cast_from_fp8
from hybrid_ep.core.quantize import cast_from_nvfp4 as cast_from_nvfp4
from hybrid_ep.core.quantize import cast_to_fp8 as cast_to_fp8
from hybrid_ep.core.quantize import cast_to_nvfp4 as cast_to_nvfp4
from hybrid_ep.core.quantize import global_scale_of as global_scale_of
from hybrid_ep.core.quantize import pack_ue8m0 as pack_ue8m0
from hybrid_ep.core.quantize import unpack_ue8m0 as unpack_ue8m0
