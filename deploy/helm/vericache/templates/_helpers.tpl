{{/* Name of the application: the label that selectors match. */}}
{{- define "vericache.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" -}}
{{- end }}

{{/* Name of all objects. */}}
{{- define "vericache.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := include "vericache.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "vericache.selectorLabels" -}}
app.kubernetes.io/name: {{ include "vericache.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "vericache.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . | nindent 0 }}
{{ end -}}
{{ include "vericache.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "vericache.metadata" -}}
name: {{ include "vericache.fullname" . | quote }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- include "vericache.labels" . | nindent 2 }}
{{- end }}

{{- define "vericache.image" -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion .Values.device) .Values.image.tag -}}
{{- .Values.image.repository }}:{{ $tag }}{{ with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{- define "vericache.serviceAccountName" -}}
{{- $own := ternary (include "vericache.fullname" .) "default" .Values.serviceAccount.create -}}
{{- default $own .Values.serviceAccount.name -}}
{{- end }}

{{- define "vericache.claimName" -}}
{{- default (printf "%s-models" (include "vericache.fullname" .)) .Values.persistence.existingClaim -}}
{{- end }}

{{- define "vericache.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled }}true{{ end -}}
{{- end }}

{{/* Seconds from the pod's end being asked for to SIGKILL. */}}
{{- define "vericache.gracePeriod" -}}
{{- $needed := add .Values.preStopSleepSeconds .Values.server.shutdownTimeoutSeconds -}}
{{- default (add $needed 30) .Values.terminationGracePeriodSeconds | int64 -}}
{{- end }}

{{/* The name that clients use and that metrics carry (vLLM: the first of the served names). */}}
{{- define "vericache.servedName" -}}
{{- default .Values.server.model .Values.server.servedModelName -}}
{{- end }}

{{/* A Kubernetes quantity of memory in GiB, as a number. */}}
{{- define "vericache.gib" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "m" 1e-3 -}}
{{- if or (not $number) (not (hasKey $units $unit)) -}}
{{- fail (printf "%q is no amount of memory; write it like 64Gi" $text) -}}
{{- end -}}
{{- divf (mulf (float64 $number) (get $units $unit)) 1073741824.0 -}}
{{- end }}
