{{/* The image. Takes a list: the root, and what is added to the tag. */}}
{{- define "hybrid-ep.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ index . 1 }}
{{- end -}}
{{- end -}}

{{/* A file that kustomize made, with its placeholders replaced. Takes a dict: root, file, imageSuffix, nodes, ranksPerNode. */}}
{{- define "hybrid-ep.file" -}}
{{- .root.Files.Get .file
    | replace "__IMAGE__" (include "hybrid-ep.image" (list .root .imageSuffix))
    | replace "__DOCTOR_IMAGE__" (include "hybrid-ep.image" (list .root "-doctor"))
    | replace "__NAMESPACE__" .root.Release.Namespace
    | replace "__NODES__" (.nodes | int | toString)
    | replace "__RANKS_PER_NODE__" (.ranksPerNode | int | toString) -}}
{{- end -}}

{{/* Changes a Pod's spec in place. Takes a dict: root, pod, values with nodeSelector, tolerations, runtimeClassName. */}}
{{- define "hybrid-ep.pod" -}}
{{- if .root.Values.imagePullSecrets }}{{ $_ := set .pod "imagePullSecrets" .root.Values.imagePullSecrets }}{{ end -}}
{{- if .values.runtimeClassName }}{{ $_ := set .pod "runtimeClassName" .values.runtimeClassName }}{{ end -}}
{{- if .values.tolerations }}{{ $_ := set .pod "tolerations" (concat (.pod.tolerations | default list) .values.tolerations) }}{{ end -}}
{{- if .values.nodeSelector }}{{ $_ := set .pod "nodeSelector" (merge (deepCopy .values.nodeSelector) (.pod.nodeSelector | default dict)) }}{{ end -}}
{{- end -}}
