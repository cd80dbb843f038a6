//! The compiler of dry devices, which compiles nothing. `runtime.rs` and `server.rs` name it.

use std::fmt;

use cubecl::ir::{ElemType, StorageType};
use cubecl_common::backtrace::BackTrace;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::KernelDefinition;
use cubecl_runtime::server::ExecutionMode;

/// A compiler that is never used: the dry server drops kernels.
#[derive(Clone, Debug, Default)]
pub struct DryCompiler;

/// What [`DryCompiler`] would compile to. Has no values.
#[derive(Clone, Copy, Debug)]
pub enum NoCode {}

impl fmt::Display for NoCode {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

impl Compiler for DryCompiler {
    type Representation = NoCode;
    type CompilationOptions = ();

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &(),
        _mode: ExecutionMode,
        _address_type: StorageType,
    ) -> Result<NoCode, CompilationError> {
        Err(CompilationError::Generic {
            reason: "a dry device has no compiler; run the kernel on a real device".into(),
            backtrace: BackTrace::capture(),
        })
    }

    fn elem_size(&self, elem: ElemType) -> usize {
        elem.size()
    }

    fn extension(&self) -> &'static str {
        "dry"
    }
}
